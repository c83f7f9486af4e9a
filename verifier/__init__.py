"""The target model: checkpoint loading, the decoder, its ops and the model runner built on them."""
