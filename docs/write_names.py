"""Write the tables of docs/from_trl.md and docs/from_verl.md: their names beside ours, as the code answers them."""

import re
from pathlib import Path

from polyrhythm.config.mistakes import all_keys, explain_unknown

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- names: written by `make docs` -->\n", "<!-- end of names -->"

TRL = {
    "What is trained": "model_name_or_path train_dataset dataset_name reward_funcs reward_weights seed shuffle_dataset",
    "How long": "max_steps num_train_epochs output_dir save_steps save_total_limit resume_from_checkpoint",
    "What is generated": """num_generations max_completion_length max_prompt_length chat_template_kwargs temperature top_p top_k min_p
        repetition_penalty per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation num_iterations""",
    "The objective": """beta epsilon epsilon_high delta loss_type scale_rewards importance_sampling_level
        mask_truncated_completions sync_ref_model""",
    "The optimizer": """learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2
        max_grad_norm optim gradient_checkpointing bf16 use_peft peft_config deepspeed""",
    "Engines": """use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length
        vllm_importance_sampling_correction""",
    "What is shown": "report_to run_name logging_steps log_completions eval_strategy eval_steps eval_dataset",
}
VERL = {
    "data": """train_files val_files train_batch_size max_prompt_length max_response_length truncation filter_overlong_prompts prompt_key shuffle""",
    "actor_rollout_ref.model": "path enable_gradient_checkpointing use_remove_padding lora_rank",
    "actor_rollout_ref.actor": """optim.lr optim.lr_warmup_steps optim.lr_warmup_steps_ratio optim.weight_decay ppo_mini_batch_size
        ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz ppo_epochs clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode
        use_kl_loss kl_loss_coef kl_loss_type entropy_coeff grad_clip fsdp_config.param_offload""",
    "actor_rollout_ref.rollout": """name n temperature top_p top_k gpu_memory_utilization tensor_model_parallel_size max_model_len max_num_seqs""",
    "algorithm": "adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty gamma lam",
    "custom_reward_function": "path name",
    "critic": "optim.lr",
    "trainer": """total_epochs total_training_steps save_freq test_freq max_actor_ckpt_to_keep resume_mode default_local_dir logger project_name
        experiment_name n_gpus_per_node nnodes""",
}
KEY = re.compile(r"(?<![\w`.\"])((?:[a-z]+\.)[a-z_]+)(?![\w`*])")
PAGES = {"from_trl.md": TRL, "from_verl.md": VERL}


def written(name: str) -> str:
    """The page with its tables renewed."""
    text = (FOLDER / name).read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    prefixed = name == "from_verl.md"
    tables = [_table(title, names.split(), f"{title}." if prefixed else "") for title, names in PAGES[name].items()]
    return text[:start] + "\n" + "\n".join(tables) + "\n" + text[end:]


def all_names() -> list[str]:
    """The names that the tables have, in full."""
    return [name for names in TRL.values() for name in names.split()] + [
        f"{section}.{name}" for section, names in VERL.items() for name in names.split()
    ]


def answer(name: str) -> str:
    """What the code says to somebody who gives this name, without the words around it."""
    said = name if name in all_keys() else explain_unknown(name).removeprefix(f"unknown key {name}: ")
    return said.removeprefix("here it is ").removeprefix("did you mean ").removesuffix("?")


def is_answered(name: str) -> bool:
    said = explain_unknown(name)
    return name in all_keys() or not ("known keys here are" in said or "the sections are" in said)


def _table(title: str, names: list[str], before: str) -> str:
    heading = f"`{title}`" if before else title
    rows = "".join(f"| `{name}` | {_marked(answer(before + name))} |\n" for name in names)
    return f"### {heading}\n\n| there | here |\n|---|---|\n{rows}"


def _marked(text: str) -> str:
    """Keys of ours as code."""
    marked = KEY.sub(lambda found: f"`{found[1]}`" if found[1] in all_keys() else found[1], text)
    return f"`{text}`" if text in all_keys() else marked.replace("|", "\\|")


if __name__ == "__main__":
    for page in PAGES:
        (FOLDER / page).write_text(written(page))
