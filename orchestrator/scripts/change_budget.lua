-- Sets or takes away the limit of a budget.
-- KEYS: 1 the budget
-- Needs: money.
-- ARGV: 1 limit in pico-dollars or '' for none, 2 whether it is a run's (1), which is forgotten some day, or the
--       farm's (0)
-- Returns: {limit or false, spent, reserved} as they are now, as text
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'limit')
else
  redis.call('HSET', KEYS[1], 'limit', ARGV[1])
end
if ARGV[2] == '1' then redis.call('EXPIRE', KEYS[1], RUN_SECONDS) end
return redis.call('HMGET', KEYS[1], 'limit', 'spent', 'reserved')
