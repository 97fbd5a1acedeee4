-- Asks for an episode's end: whoever runs it, or takes it, sees the mark at its next look; one in line is woken for it.
-- Needs: limits.
-- KEYS: 1 episode row, 2 wake list of this episode
-- ARGV: (none)
-- Returns: the state in which it was found, or '' when there is no such episode; a final one is left as it is
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return '' end
if state ~= 'final' then
  redis.call('HSET', KEYS[1], 'cancel', '1')
  if redis.call('LLEN', KEYS[2]) == 0 then push_wake(KEYS[2]) end
end
return state
