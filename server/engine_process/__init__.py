"""Where engines run: in processes of their own for a server, in the calling process for a notebook."""
