"""PPO and GRPO: the model answers, its answers are judged, and it learns from that."""
