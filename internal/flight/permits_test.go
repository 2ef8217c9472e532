package flight

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

var key = decide.Key{Name: "l", Key: "k"}

func TestNoPermitIsChosenTwice(t *testing.T) {
	var s Permits
	now := time.Now()
	first, ok := s.Choose(key, 1, now)
	if !ok || first != (Choice{0, true}) {
		t.Fatalf("got %v and %v, want the only permit, which may be new", first, ok)
	}
	if c, ok := s.Choose(key, 1, now); ok {
		t.Errorf("got %v while it is tried", c)
	}
	s.Taken(key, 0, now.Add(time.Minute))
	if c, ok := s.Choose(key, 1, now); ok {
		t.Errorf("got %v while it is held", c)
	}
	s.Freed(key, 0)
	if c, ok := s.Choose(key, 1, now); !ok || c != (Choice{0, false}) {
		t.Errorf("got %v and %v, want the one that was released", c, ok)
	}
	s.Missed(key, 0)
	if c, ok := s.Choose(key, 1, now); ok {
		t.Errorf("got %v after it was tried in vain, want somebody to look", c)
	}
	if !s.Observe(key, []Choice{{Number: 0}}, false, now) {
		t.Error("what was seen free is not worth trying")
	}
	if _, ok := s.Choose(key, 1, now); !ok {
		t.Error("what was seen free is not chosen")
	}
}

// Several are chosen if so many are free, and one that was seen free twice is one.
func TestChoosesAllOrNothing(t *testing.T) {
	var s Permits
	now := time.Now()
	s.Observe(key, []Choice{{Number: 0}, {Number: 1}, {Number: 5}}, false, now)
	s.Freed(key, 1)
	if got := s.ChooseAll(key, 3, 5, now); len(got) > 0 {
		t.Errorf("got %v of two", got)
	}
	got := s.ChooseAll(key, 2, 5, now)
	if len(got) != 2 || got[0] == got[1] {
		t.Errorf("got %v, want two", got)
	}
	if again := s.ChooseAll(key, 1, 5, now); len(again) > 0 {
		t.Errorf("got %v while they are tried", again)
	}
	s.Unchoose(key, got)
	if c, ok := s.Choose(key, 5, now); !ok || c.Number > 1 {
		t.Errorf("got %v and %v, want one that was not tried", c, ok)
	}
}

// What was taken here after somebody began to look is not free, whatever was seen; what was
// held before is, if its lease is over.
func TestSawBeforeItWasTaken(t *testing.T) {
	var s Permits
	begun := time.Now()
	s.Taken(key, 0, begun.Add(time.Hour))
	if s.Observe(key, []Choice{{Number: 0}}, false, begun.Add(-time.Second)) {
		t.Error("a permit is free that was taken since")
	}
	if !s.Observe(key, []Choice{{Number: 0}}, false, time.Now().Add(time.Second)) {
		t.Error("a permit is not free whose lease is over")
	}
}

func TestOnlyThoseOfTheLimitAreChosen(t *testing.T) {
	var s Permits
	s.Observe(key, []Choice{{Number: 4}, {Number: 1}}, false, time.Now())
	if c, ok := s.Choose(key, 2, time.Now()); !ok || c.Number != 1 {
		t.Errorf("got %v and %v, want 1", c, ok)
	}
	if c, ok := s.Choose(key, 2, time.Now()); ok {
		t.Errorf("got %v of two", c)
	}
}

// enter has somebody come, and go in line.
func enter(s *Permits, limit ratelimit.InFlight) *Waiter {
	w, asks := s.Arrive(limit.For(key.Key))
	if asks {
		s.Enter(w)
	}
	return w
}

func TestHandsOnInOrder(t *testing.T) {
	var s Permits
	limit := ratelimit.InFlight{Name: "l", Limit: 1}
	if s.Hand(key, ratelimit.Permit{}) {
		t.Error("handed to nobody")
	}
	first, second, third := enter(&s, limit), enter(&s, limit), enter(&s, limit)
	if len(first.Turn) != 1 || len(second.Turn) != 0 {
		t.Error("it is not the turn of the first, and of nobody else")
	}
	if _, ok := s.HandOn(key, 0, time.Now()); !ok {
		t.Error("a permit is not handed on")
	}
	if !s.Hand(key, ratelimit.Permit{Fence: 1}) || len(first.Got) != 1 || len(second.Turn) != 1 {
		t.Error("it is not handed to the first, or the second is not told")
	}
	if permit, ok := s.Leave(first); !ok || permit.Fence != 1 {
		t.Error("who leaves without reading its permit does not give it back")
	}
	if _, ok := s.Leave(second); ok || len(third.Turn) != 1 {
		t.Error("the third is not told that it is first")
	}
	if _, ok := s.HandOn(key, 0, time.Now().Add(2*turnTime)); ok {
		t.Error("it is never others' turn")
	}
	if _, ok := s.HandOn(key, 1, time.Now()); ok {
		t.Error("a permit is handed to somebody whose limit has it not")
	}
	s.Leave(third)
	if s.Waiting(key) > 0 {
		t.Error("somebody waits")
	}
}

// Somebody who asked leaves room for another.
func TestAsksAfterOthers(t *testing.T) {
	var s Permits
	limit := ratelimit.InFlight{Name: "l", Limit: 1}
	for i := range 2 {
		w, asks := s.Arrive(limit.For(key.Key))
		if !asks {
			t.Errorf("caller %d does not ask", i)
		}
		s.forgetSome(time.Now().Add(time.Hour))
		s.Leave(w)
	}
	if s.of(key).asking != 0 {
		t.Errorf("%d ask, want nobody", s.of(key).asking)
	}
}

// Who is first is told to try when there is a reason, and otherwise that it is to look in time.
func TestTellsTheFirst(t *testing.T) {
	var s Permits
	limit := ratelimit.InFlight{Name: "l", Limit: 3}
	first, second := enter(&s, limit), enter(&s, limit)
	if now := <-first.Turn; !now {
		t.Error("the first is not to try")
	}
	s.Hand(key, ratelimit.Permit{})
	if now := <-second.Turn; now {
		t.Error("who comes next is to try, although nothing is free")
	}
	at := time.Now().Add(time.Second)
	if s.LookAgain(key, at); !s.Look(key).Equal(at) {
		t.Errorf("the next is to look at %v, want %v", s.Look(key), at)
	}
	third := enter(&s, limit)
	s.Freed(key, 1)
	s.Leave(second)
	if now := <-third.Turn; !now {
		t.Error("who comes next is not to try, although a permit is free")
	}
	s.Leave(third)
}

// Keys that nobody holds or waits for are forgotten.
func TestForgetsKeys(t *testing.T) {
	var s Permits
	held := decide.Key{Name: "l", Key: "held"}
	s.Taken(held, 0, time.Now().Add(time.Hour))
	for i := range 2 * mostKeys {
		k := decide.Key{Name: "l", Key: string(rune(i + 1))}
		s.Choose(k, 1, time.Now())
		s.Freed(k, 0)
	}
	if n := len(s.keys); n > mostKeys+1 {
		t.Errorf("%d keys are remembered", n)
	}
	if _, ok := s.keys[held]; !ok {
		t.Error("one of which a permit is held is not")
	}
}
