"""Evaluation by harnesses of others, inspect-ai and lm-eval, on the engines of a run.

harness process            HTTP threads                program (coordinator)      ranks
POST /v1/completions  ---> CallReader: tokens    --->  EngineDoor.answer   --->   EngineAnswers of all
score, next sample    <--- write_answer          <---  results of the calls <---  calls that wait
results.json          ------------------------------>  HarnessProcess.results
"""
