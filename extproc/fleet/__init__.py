"""What each replica is doing now: polled state and the router's own ledger."""
