-- Opens an episode's row, once, before its job is enqueued.
-- KEYS: 1 episode row, 2 open
-- ARGV: 1 episode id, 2 job id, 3 spec JSON, 4 run id, 5 group id or '', 6 id of the trainer that drives it or '',
--       7 name of the queue that its job goes to, 8 template, 9 the longest that its policy sandbox can live, s,
--       10 the same of its verifier, 11 id of the reservation of its batch or '',
--       12 how long it may be queued while others of that batch run, ms
-- Returns: 1 opened, 0 it was there already
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local now = now_ms()
redis.call('HSET', KEYS[1], 'state', 'queued', 'job', ARGV[2], 'attempt', 1, 'spec', ARGV[3], 'run', ARGV[4],
           'group', ARGV[5], 'trainer', ARGV[6], 'queue', ARGV[7], 'queued_at', now, 'unsettled', 0, 'allocations', '',
           'template', ARGV[8], 'policy_seconds', ARGV[9], 'verifier_seconds', ARGV[10], 'batch', ARGV[11],
           'together_ms', ARGV[12])
redis.call('ZADD', KEYS[2], now, ARGV[1])
return 1
