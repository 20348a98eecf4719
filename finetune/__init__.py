"""How a checkpoint is judged: fine-tuning on GLUE, and the tables that come of it."""
