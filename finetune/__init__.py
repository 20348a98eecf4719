"""How a checkpoint is judged: fine-tuning on GLUE, and the tables made from the results.

What belongs here: tasks, their data and metrics, the fine-tuning loop, reports and publishing.
Not here: pretraining (`train`) and the model itself (`roformer`).
"""
