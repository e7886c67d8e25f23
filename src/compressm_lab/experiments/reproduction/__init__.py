"""The paper's tables and figures: which trainings each needs, and how they are carried out."""
