"""From results.jsonl to tables, statistics, figures and one page.

What belongs here: everything that reads results and predictions, and trains nothing.
Not here: running tasks (`finetune.glue`, `finetune.grid`) and publishing (`finetune.publish`).
"""
