"""The models of one server: which exist, which are loaded, and which requests wait for one.

::

    Models        names, leases, life                    what the routes use
    └── Residency loaded models, waiting requests        the only one that loads and unloads
        └── Model one model: settings, engine, service   a resident, which loads on command

A server without ``[models.NAME]`` has one model, which is loaded at the start. docs/models.md is the description.
"""
