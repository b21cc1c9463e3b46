"""From a pretrained model to one that answers: fine-tuning, preferences, reinforcement."""
