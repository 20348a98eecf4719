"""What leaves the machine: model folders with their cards, and the zip for the test server.

What belongs here: writers and checks of files meant for others.
Not here: results and figures (`finetune.report`).
"""
