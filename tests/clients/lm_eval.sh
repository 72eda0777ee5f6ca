# packages: lm-eval[api] transformers
export HOME=$PWD HF_HUB_OFFLINE=1
printf '{"question": "A river", "answer": " flows"}\n{"question": "A rope", "answer": " holds"}\n' >rivers.jsonl
cat >rivers.yaml <<'TASK'
task: rivers
dataset_path: json
dataset_kwargs: {data_files: {test: rivers.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
TASK
lm-eval --model local-completions --include_path . --tasks rivers --model_args \
    "model=$MODEL,base_url=$OPENAI_BASE_URL/completions,tokenizer=$PROCESSOR,num_concurrent=2" >table
grep -q perplexity table
echo 'log-likelihoods'
