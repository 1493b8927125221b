"""How much the proxy takes on: queue, limits of each key, bodies, and clients that do not read or write."""
