package main

import (
	"fmt"
	"sync"
	"time"
)

// provider is a fake of a company that rents out language models.
type provider struct {
	mu          sync.Mutex
	calls       []time.Time
	most        int       // calls within a second
	refused     int       // answers of 429
	closed      time.Time // until when there is a pause
	known       time.Time // from when the callers knew, and jobs that had started had time to end
	disregarded int       // calls in a pause that was known
}

// tooManyRequests is the answer 429, with Retry-After.
type tooManyRequests struct{ retryAfter time.Duration }

func (e *tooManyRequests) Error() string {
	return fmt.Sprintf("429 Too Many Requests, Retry-After: %v", e.retryAfter)
}

// complete answers a prompt, and says how many tokens that took.
func (p *provider) complete(args PromptArgs) (used int, err error) {
	if err := p.comeIn(time.Now()); err != nil {
		return 0, err
	}
	time.Sleep(50 * time.Millisecond) // thinks
	return args.MaxTokens * (20 + len(args.Prompt)%3*10) / 100, nil
}

// comeIn counts a call. In the middle it finds that it is overloaded, once.
func (p *provider) comeIn(now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, now)
	within := 0
	for _, c := range p.calls {
		if now.Sub(c) < time.Second {
			within++
		}
	}
	p.most = max(p.most, within)
	if now.Before(p.closed) && !p.known.IsZero() && now.After(p.known) {
		p.disregarded++
	}
	if len(p.calls) == prompts/2 {
		p.closed = now.Add(pause)
		p.refused++
		return &tooManyRequests{pause}
	}
	return nil
}

// pauseIsKnown notes that the callers have heard of the pause. A call that had
// passed the gate before may still arrive, for as long as the slack allows.
func (p *provider) pauseIsKnown() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = time.Now().Add(startSlack)
}
