// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"time"
)

// row is one fault or scenario. It ends, whatever its face, with the questions of bench.finish.
type row struct {
	// ids are what it is of: FT1 to FT28 and SC1 to SC23.
	ids  []string
	name string
	// layer is what is played: the driver alone, or the recipe: the node's loop with it.
	layer string
	// asks is what has to be so in the end, beside what is asked of every row.
	asks string
	run  func(b *bench)

	// changes is how many changing calls there may be; lives how many whole lives of a unit the requests have to do for,
	// and more what the fault itself costs.
	changes, lives, more int
	// listings is how often all devices may be read beyond that.
	listings int
	// quiet: it is about no fault.
	quiet bool
	// login: it is about credentials, and not for installations that ask for none.
	login bool
	// restarts: the chassis keeps its state.
	restarts bool
	// skew is how far the manager's clock is ahead; call is the agent's callTimeout where the setting's does not do.
	skew, call time.Duration
}

// The layers.
const (
	driver = "driver"
	recipe = "recipe"
)

// faults and scenarios that there are to be.
const (
	faults    = 28
	scenarios = 23
)

func rows() []row {
	return []row{
		{
			ids: []string{"SC1"}, name: "attach and detach", layer: recipe, run: attachDetach, quiet: true, changes: 2, lives: 1,
			asks: "the claim is told once, of the device that is there",
		},
		{
			ids: []string{"SC2"}, name: "several on one host", layer: recipe, run: severalOnOne, quiet: true, changes: 6, lives: 4,
			asks: "three units have three devices",
		},
		{
			ids: []string{"SC2"}, name: "several go back at once", layer: recipe, run: backTogether(0), quiet: true, changes: 6, lives: 4,
			asks: "what the manager takes in one call is one call, two at most",
		},
		{
			ids: []string{"FT21", "SC2", "SC16"}, name: "several go back, refused at first", layer: recipe, run: backTogether(1), changes: 10, lives: 5, more: 120,
			asks: "each is asked for again, and comes back",
		},
		{
			ids: []string{"SC3", "FT27"}, name: "hosts in parallel", layer: recipe, run: parallelHosts, changes: 40, lives: 12, more: 60,
			asks: "each has its own; of two that want the last one, one gets it",
		},
		{
			ids: []string{"FT27", "SC5"}, name: "two processes of one node", layer: recipe, run: twoProcesses, changes: 4, lives: 5, more: 60,
			asks: "one device at most, and none is left: that only one works is a lock's part",
		},
		{
			ids: []string{"FT1", "SC12"}, name: "token revoked", layer: recipe, run: tokenRevoked, login: true, changes: 6, lives: 3,
			asks: "one login more for each process, and nothing is asked twice",
		},
		{
			ids: []string{"FT2", "SC12"}, name: "login is down", layer: driver, run: loginDown, login: true, more: 60,
			asks: "the old token is used while it lives, then calls fail, then a new one is fetched",
		},
		{
			ids: []string{"FT3"}, name: "login is refused", layer: recipe, run: loginRefused, login: true, changes: 6, lives: 3, more: 80,
			asks: "one try every 10 s at most for each process, and the unit comes when it is taken back",
		},
		{
			ids: []string{"FT26", "SC12"}, name: "clock 5 min ahead", layer: recipe, run: skewedClock, login: true, skew: 5 * time.Minute, changes: 2, lives: 1,
			asks: "one login for each process",
		},
		{
			ids: []string{"FT26", "SC12"}, name: "clock 5 min behind", layer: recipe, run: skewedClock, login: true, skew: -5 * time.Minute, changes: 2, lives: 1,
			asks: "one login for each process",
		},
		{
			ids: []string{"FT4", "SC13"}, name: "busy for 30 s", layer: recipe, run: busyStorm, changes: 12, lives: 2, more: 20,
			asks: "the same is asked every 5 s at most",
		},
		{
			ids: []string{"FT5"}, name: "5xx without effect", layer: recipe, run: lost("ErrorBefore"), changes: 4, lives: 4, more: 300,
			asks: "it is asked again only when nothing can come any more",
		},
		{
			ids: []string{"FT6", "SC4"}, name: "5xx with effect", layer: recipe, run: lost("ErrorAfter"), changes: 2, lives: 2,
			asks: "what came is taken, and nothing is asked again",
		},
		{
			ids: []string{"FT7", "SC4"}, name: "answer lost", layer: recipe, run: lost("LostAfter"), changes: 2, lives: 2,
			asks: "what came is taken, and nothing is asked again",
		},
		{
			ids: []string{"FT7", "SC4"}, name: "answer cut off", layer: recipe, run: lost("Truncated"), changes: 2, lives: 2,
			asks: "what came is taken, and nothing is asked again",
		},
		{
			ids: []string{"FT7", "FT11", "SC4"}, name: "answer lost, work goes on", layer: recipe, run: lostAndSlow, changes: 4, lives: 5, more: 300,
			asks: "asking again amid the work brings no second device",
		},
		{
			ids: []string{"FT8", "SC4"}, name: "request lost", layer: recipe, run: lost("LostBefore"), changes: 4, lives: 4, more: 300,
			asks: "it is asked again only when nothing can come any more",
		},
		{
			ids: []string{"FT8", "SC4"}, name: "no answer for ever", layer: recipe, run: lost("Hang"), changes: 4, lives: 4, more: 300,
			asks: "the call ends by its own time, and it is asked again only when nothing can come any more",
		},
		{
			ids: []string{"FT9", "SC6"}, name: "processed twice", layer: recipe, run: processedTwice, changes: 6, lives: 4, more: 120,
			asks: "one device is the unit's; one left over is foreign until it is adopted, and goes back",
		},
		{
			ids: []string{"FT10", "SC7"}, name: "partial attach", layer: recipe, run: partialAttach, changes: 3, lives: 3, more: 300,
			asks: "none of one is not taken for one, and it is asked again",
		},
		{
			ids: []string{"FT11", "SC5"}, name: "slow, and the agent starts anew", layer: recipe, run: slowRestart, changes: 3, lives: 3, more: 120,
			asks: "the next process goes on with what is stored, and asks for nothing",
		},
		{
			ids: []string{"FT11", "SC8"}, name: "10 min of work", layer: recipe, run: tenMinutes, call: 12 * time.Minute, changes: 2, lives: 5, more: 900,
			asks: "the claim is told in time that it failed; what comes late is found and goes back",
		},
		{
			ids: []string{"SC5"}, name: "the agent dies at each step", layer: recipe, run: diesAtEachStep, changes: 400, lives: 500,
			asks: "one device for each intent, before and after each step",
		},
		{
			ids: []string{"FT12", "SC9"}, name: "critical", layer: recipe, run: critical, changes: 6, lives: 3, more: 120,
			asks: "a bad one stays attached and out of use, one replacement is asked for, and one that goes bad later is not attached anew",
		},
		{
			ids: []string{"FT13"}, name: "health unknown", layer: recipe, run: healthUnknown, changes: 2, lives: 2,
			asks: "unknown is not failed",
		},
		{
			ids: []string{"FT14", "SC10"}, name: "stolen", layer: recipe, run: stolen, changes: 10, lives: 5,
			asks: "it fails for good for now, another model comes, and it comes when there is one again",
		},
		{
			ids: []string{"FT15", "SC11"}, name: "duplicate identity", layer: recipe, run: duplicateIdentity, changes: 8, lives: 6, more: 60,
			asks: "nobody is told of a device that could be another one",
		},
		{
			ids: []string{"FT16", "SC11"}, name: "identity is missing", layer: recipe, run: identityMissing, changes: 8, lives: 5, more: 60,
			asks: "it fails with a word; what alone came goes back, off the bus first, and of two neither goes until a person takes it away",
		},
		{
			ids: []string{"FT17"}, name: "vanished, or not to be read", layer: recipe, run: vanished, changes: 4, lives: 4, more: 120,
			asks: "a list that cannot be read takes nothing away; a device that is not listed is gone",
		},
		{
			ids: []string{"FT18", "SC14"}, name: "paged lists", layer: driver, run: pagedLists, listings: 12,
			asks: "all members, each once, whatever changes between two pages",
		},
		{
			ids: []string{"FT19", "SC15"}, name: "one machine cannot be read", layer: recipe, run: oneMachineBroken, changes: 20, lives: 6, more: 120,
			asks: "the others go on, and it follows",
		},
		{
			ids: []string{"FT20", "SC16"}, name: "detach of what is gone", layer: recipe, run: detachAbsent, changes: 4, lives: 2,
			asks: "gone is done",
		},
		{
			ids: []string{"FT21", "SC16"}, name: "detach refused", layer: recipe, run: detachRefused, changes: 8, lives: 4, more: 60,
			asks: "it is asked again every 5 s at most, and goes in the end",
		},
		{
			ids: []string{"FT22", "SC17"}, name: "list lags behind", layer: recipe, run: listLags, changes: 2, lives: 2, more: 120,
			asks: "nothing is asked again while the list may be old",
		},
		{
			ids: []string{"FT23", "SC18"}, name: "a person's hand", layer: recipe, run: personsHand, changes: 4, lives: 4, more: 60,
			asks: "what a person attached is left alone, what a person took is given up",
		},
		{
			ids: []string{"FT23", "SC18"}, name: "a person's hand amid an attach", layer: recipe, run: handAmidAttach, changes: 4, lives: 4, more: 120,
			asks: "one of the two is the unit's, if it can be told which GPU that is; the other is left alone",
		},
		{
			ids: []string{"FT24", "SC19"}, name: "the manager starts anew", layer: recipe, run: managerRestarts, restarts: true, changes: 4, lives: 6, more: 300,
			asks: "what it had begun is found",
		},
		{
			ids: []string{"FT25", "SC20"}, name: "answers without an end", layer: recipe, run: endlessAnswers, changes: 4, lives: 6, more: 300,
			asks: "reading stops at a bound, and what came of it is found",
		},
		{
			ids: []string{"FT28", "SC20"}, name: "strange answers", layer: recipe, run: strangeAnswers, changes: 2, lives: 1,
			asks: "fields that nobody knows, lists in another order and numbers as text change nothing",
		},
		{
			ids: []string{"SC21"}, name: "stuck work", layer: recipe, run: stuckWork, changes: 8, lives: 8, more: 300,
			asks: "it is shown, nothing is asked meanwhile, and it goes on when a person has seen to it",
		},
		{
			ids: []string{"SC22"}, name: "model in another spelling", layer: driver, run: otherSpelling, quiet: true, changes: 4, more: 20, listings: 3,
			asks: "it is refused, and nothing comes",
		},
		{
			ids: []string{"SC23"}, name: "a day of faults", layer: recipe, run: dayOfFaults, changes: 1 << 20, more: 1 << 20,
			asks: "every claim gets its device in the end, and all go back",
		},
	}
}
