# packages: schemathesis
# Not every valid body is answered with 200: prompts may be too long and fields may contradict each
# other, which a schema cannot say. A wrong media type is found before a wrong method is.
schemathesis run "${OPENAI_BASE_URL%/v1}/openapi.json" --max-examples "${EXAMPLES:-20}" \
    --header "Authorization: Bearer $OPENAI_API_KEY" \
    --exclude-checks positive_data_acceptance,unsupported_method --request-timeout 60 >report ||
    { cat report && exit 1; }
grep '^  [0-9]* generated' report
