"""The laboratory: the paper's tasks, trainings, tables and figures, made with compressm."""
