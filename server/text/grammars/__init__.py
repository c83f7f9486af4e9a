"""Structured output: from the request's fields to a grammar, and from a grammar to the masks of a tree.

::

    in the server, before a request is sent
        fields.py      response_format, structured_outputs, JSON schemas -> Grammar
        answers.py     the grammar of a whole chat answer: tool calls, after its reasoning
    in the engine process
        compiler.py    Grammar -> constraint, for one tokenizer, in parallel to the steps
        constraint.py  a foresay.spec.constrain.Constraint: the matcher at the committed text, walks over a drafted tree
"""
