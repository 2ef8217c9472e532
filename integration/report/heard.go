package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// heard is what Config.Observe is told of one call, which it finds by the call's context.
type heard struct {
	mu     sync.Mutex
	events []ratelimit.Event
}

type heardKey struct{}

// observe is Config.Observe.
func observe(ctx context.Context, e ratelimit.Event) {
	if h, ok := ctx.Value(heardKey{}).(*heard); ok {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.events = append(h.events, e)
	}
}

// hear makes a call, and notes if Config.Observe is told something else than the caller.
func (w *worker) hear(ctx context.Context, form ratelimit.Form, call func(ctx context.Context) (ratelimit.Result, error)) (ratelimit.Result, error) {
	var h heard
	result, err := call(context.WithValue(ctx, heardKey{}, &h))
	h.mu.Lock()
	defer h.mu.Unlock()
	if ended := (*ratelimit.WaitError)(nil); !errors.As(err, &ended) && h.unlike(form, result, err) { // Wait gives back what it had reserved
		w.unlike = fmt.Sprintf("a call that is told %t, %v is heard as %v", result.OK, err, h.events)
	}
	w.memory = w.memory || len(h.events) == 1 && h.events[0].Form == ratelimit.FormMemory
	return result, err
}

// unlike reports whether what was heard of a call is not one event with what its caller was told.
func (h *heard) unlike(form ratelimit.Form, result ratelimit.Result, err error) bool {
	if len(h.events) != 1 {
		return true
	}
	e := &h.events[0]
	granted := e.Outcome == ratelimit.OutcomeGranted
	refused := e.Outcome == ratelimit.OutcomeRefused
	switch {
	case e.Form != form && (form != ratelimit.FormOwn || e.Form != ratelimit.FormMemory):
		return true
	case err == nil && result.OK:
		return !granted || result.Request.Limit != nil && fmt.Sprint(took(e.Result)) != fmt.Sprint(took(result))
	case err == nil, errors.Is(err, ratelimit.ErrRefused):
		return !refused
	case errors.Is(err, pgstore.ErrOutcomeUnknown):
		return e.Outcome != ratelimit.OutcomeUnknown
	}
	return granted || refused || e.Err == nil && e.Outcome != ratelimit.OutcomeRolledBack // of a panic there is none
}
