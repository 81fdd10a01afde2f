"""Discovery and scraping of replicas."""
