"""Models as llama.cpp keeps them: one file of weights, with configuration and tokenizer in its metadata.

::

    file.py        the file: metadata, and which tensors it holds of which type
    parts.py       which files are one file cut up, and which of a repository's is meant
    names.py       what its tensors are called here
    config.py      metadata -> what config.json says
    tokens.py      metadata -> what tokenizer.json says
    directory.py   a directory made of all that, with the file in it: such a one every part of a server can read
    blocks.py      numbers in blocks, as they lie in the file -> matrices of whole numbers
    weights.py     the directory's tensors, read
"""
