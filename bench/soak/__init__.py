"""A soak: random requests, cancels, sockets, kills and freezes, every answer compared with plain decoding.

::

    requests   the requests, drawn from a seed
    answers    what must be the same in an answer however it is sent: whole, streamed, over a socket, cut short
    clients    send requests and receive the answers: over HTTP and WebSockets, slowly, or leaving in the middle
    served     a ``foresay serve`` of its own: killed, frozen, measured, its page accounting read
    storm      waves of clients during kills and freezes; the plain server that gives the right answers
"""
