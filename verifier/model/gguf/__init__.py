"""Models as llama.cpp keeps them: one file of weights, with configuration and tokenizer in its metadata.

::

    file.py        the file, whole or cut up: metadata, and which tensors it holds of which type
    config.py      metadata -> what config.json says, and what its tensors are called here
    directory.py   metadata -> what tokenizer.json says; a directory of all that and the file, as all of a server reads
    weights.py     the directory's tensors, read: numbers in blocks -> matrices of whole numbers
"""
