"""verl 0.9.1: its trainer and its FSDP2 engine with our forward; nothing of verl is patched.

`python -m train_bridge.verl.main_ppo --config-name true_on_policy_grpo_fsdp` runs it.
"""
