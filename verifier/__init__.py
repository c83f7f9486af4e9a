"""The model that decides: checkpoint loading, the decoder, its ops and the target built on them."""
