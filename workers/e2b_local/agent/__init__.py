"""The program that runs inside every sandbox, as its first process, and answers the in-sandbox API.

It is started by whatever Python the sandbox offers, so it imports the standard library only, little of that, and
nothing of ours outside this package. It holds no secret: the host checks tokens before a request gets here, and the
only way in is a socket inherited from the host. As process 1 of its namespace it cannot be signalled from inside, and
its end is the end of every process of the sandbox.
"""
