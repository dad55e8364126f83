"""The small recipe that the tests of recipes and of training share."""

import yaml

# 12 steps to an epoch: step 15 and the last one, 32, lie within one.
TINY = yaml.safe_load("""
task: listops
seed: 3
data: {min_length: 4, max_length: 16, max_depth: 4, num_train: 96, num_validation: 40, num_test: 30, seed: 1}
tokenizer: {kind: listops, max_length: 16, truncation: false}
model:
  {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 16,
   hidden_dropout: 0.2, attention_dropout: 0.2}
training:
  max_steps: 32
  per_device_train_batch_size: 8
  per_device_eval_batch_size: 16
  learning_rate: 0.003
  train_sampling_strategy: group_by_length
  eval_strategy: steps
  eval_steps: 5
  save_strategy: steps
  save_steps: 5
  save_total_limit: 2
  load_best_model_at_end: true
  metric_for_best_model: accuracy
  logging_steps: 5
""")


def write_recipe(path, content):
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path
