"""The step: builds batches from plans, runs the model, samples, records; and the thread for it."""
