TITLES = {n: n for n in ("megatron_parity", "pipeline_bubble","megatron_resharding","loss_scale_states","indexed_tokens","megatron_pretraining","megatron_adaptation","adaptation_advice")}
PLOTS = ()
