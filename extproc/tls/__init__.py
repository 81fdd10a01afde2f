"""TLS on the ports that others connect to: files, read again when they change."""
