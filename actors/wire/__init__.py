"""The wire: ZeroMQ sockets around the protocol of `policies.codec`.

`loop.Loop` is one thread with its sockets and timers; `server.Server` answers many peers on it, `connection.Connection`
asks one peer on it.
"""
