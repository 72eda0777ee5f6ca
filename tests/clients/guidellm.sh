# packages: guidellm
export HOME=$PWD HF_HUB_OFFLINE=1
guidellm run --backend "kind=openai_http,target=${OPENAI_BASE_URL%/v1},model=$MODEL" \
    --profile kind=synchronous --constraint kind=max_requests,count=2 \
    --data kind=synthetic_text,prompt_tokens=16,output_tokens=8 \
    --tokenizer "kind=hf_auto,model=$PROCESSOR" --output kind=json --disable-console 2>&1 | tee report
grep -q 'successful=2 errored=0' report
echo 'benchmark of 2 requests'
