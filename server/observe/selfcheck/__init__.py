"""Is it still so? Texts that were written are decoded again, plainly and from nothing, and compared token by token.

::

    answer.py      a text that was written: its request and its tokens; the request that writes it again plainly
    recorder.py    in a server: keeps the tokens of a request that was picked
    backlog.py     those that wait to be checked, bounded
    rerun.py       one plain re-run, compared as it comes
    check.py       the server's check: picks, waits for idle time, re-runs, makes way
    prompts.py     the command's: every prompt, drafted and plainly
"""
