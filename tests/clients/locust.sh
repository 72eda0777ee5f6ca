# packages: locust
cat >locustfile.py <<'PROGRAM'
import os
from locust import HttpUser, task

class Reader(HttpUser):
    @task
    def ask(self):
        self.client.post("/v1/completions", json={
            "model": os.environ["MODEL"], "prompt": "A river", "max_tokens": 4})
PROGRAM
locust --headless --users 2 --spawn-rate 2 --run-time 4s --host "${OPENAI_BASE_URL%/v1}" \
    --exit-code-on-error 1 --only-summary
echo 'two users, no failure'
