"""`--workers N`: several proxies on one port, each a process, under one that keeps them running."""
