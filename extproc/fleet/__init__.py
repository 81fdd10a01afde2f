"""State of the replicas: what polls reported, and this router's own requests in flight."""
