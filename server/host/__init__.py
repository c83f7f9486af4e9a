"""Who holds engines: in a process of their own for a server, in the calling one for a notebook."""
