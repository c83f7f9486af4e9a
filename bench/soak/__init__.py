"""A soak: random requests, cancels, sockets, kills and freezes, every answer compared with plain decoding.

::

    requests   what is asked, drawn from a seed
    answers    what of an answer must be the same however it came: whole, streamed, over a socket, cut short
    clients    sends requests and hears the answers: over HTTP and WebSockets, slowly, or leaving in the middle
    served     a ``foresay serve`` of its own: killed, frozen, measured, its page ledger read
    storm      waves of clients beside kills and freezes; the plain server that says what would have been right
"""
