"""Trial of the Helm chart in a real cluster; not a part of the test suite."""
