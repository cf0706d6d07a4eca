"""The decisions of regraft: plain values in, plain values out.

Nothing here imports ray, zmq, asyncio or threading, reads a clock, or draws a random number of its own. Time reaches
a policy as a number (``now``, seconds on any monotonic clock). So every rule of the system can be tested by
properties at full speed, and every actor is a shell that receives, asks and sends.
"""
