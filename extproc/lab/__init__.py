"""Everything that imitates production: simulated replicas, replays of records, the demo."""
