"""All I/O of regraft: the Ray actors, the client, the wire and the engines.

Start with `actors.data_plane.DataPlane` (launch, attach, save, restore, close) and `actors.client.DataPlaneClient`.
"""
