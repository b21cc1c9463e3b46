"""PPO and GRPO: training on answers that the model generates, by the rewards that they get.

A *rollout* is the generation of answers to a number of prompts, with their rewards and advantages; several training
steps use it. The *policy* (or actor) is the model that is trained.
"""
