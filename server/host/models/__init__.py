"""The models of one server: which there are, which are loaded, and who waits for one.

::

    Models        names, leases, life                    what the routes ask
    └── Residency which are in, who waits, who leaves    the only one that loads and unloads
        └── Model one model: settings, engine, service   does as it is told

A server without ``[models.NAME]`` has one model, which is loaded at the start. docs/models.md is the description.
"""
