"""Structured output: from the request's fields to a grammar, and from a grammar to the masks of a tree.

::

    in the server, before a request is sent
        fields.py      response_format, structured_outputs -> Grammar
        schema.py      what of JSON schema is refused, and how JSON is written
        lark.py        grammars, regular expressions and choices as llguidance takes them
        calls.py       tool calls -> Grammar (bare.py, strict.py)
        answers.py     all that a chat answer must match, behind its reasoning
    in the engine process
        pending.py     requests whose grammars are being compiled, beside the steps
        compiler.py    Grammar -> constraint, for one tokenizer (forcing.py)
        constraint.py  a spec.protocols.Constraint: the matcher at the committed text
        walk.py        down and up a drafted tree with a copy of it
"""
