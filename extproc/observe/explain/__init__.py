"""``extproc explain``: what a running router decided, and why."""
