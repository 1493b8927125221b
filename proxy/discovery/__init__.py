"""Where the proxy's nodes are: sources that say so, and the sessions that follow what they say."""
