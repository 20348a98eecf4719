"""Faster implementations of operations the model defines elsewhere; outputs stay the same.

What belongs here: attention, linear layers and dropout for a device, and the choice between them.
Not here: anything that decides what is computed.
"""
