"""What the project knows of Envoy: its schema, and how clusters follow the router's choice."""
