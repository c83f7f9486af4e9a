"""Models in llama.cpp's format: one file of weights, with configuration and tokenizer in its metadata.

::

    file.py        the file, whole or split: metadata, and its tensors with their types
    config.py      metadata -> config.json, and the names of its tensors here
    directory.py   metadata -> tokenizer.json; a directory of these and the file, as the server reads it
    weights.py     reads the directory's tensors: numbers in blocks -> matrices of integers
"""
