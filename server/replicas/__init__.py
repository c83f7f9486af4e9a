"""Several engines for one server, each in a replica that may be on another machine (docs/scale.md)."""
